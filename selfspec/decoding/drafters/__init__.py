"""What proposes tokens. `decode` knows the protocol only; options choose."""
