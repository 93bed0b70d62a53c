"""Everything that owns memory or time: sequences, pages, scheduling, the engine."""
