"""Chat formats: per model, how a conversation becomes a prompt and an answer becomes a message."""
