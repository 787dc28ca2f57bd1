"""A server that speaks OpenAI's protocol: `selfspec serve`."""
