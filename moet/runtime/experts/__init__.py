"""Where expert rows live: tiers of memory behind one slot table."""
