"""What `selfspec chat` is made of: the conversation, its commands, reading and writing."""
