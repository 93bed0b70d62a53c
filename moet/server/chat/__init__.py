"""Chat formats by model type: how a conversation becomes a prompt, and an answer a message."""
