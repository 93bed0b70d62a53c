"""Seeded generators of conversations: stories, facts, sums, tools, retrieval, JSON, small talk.

All text is made here from word lists and templates. Whether a sample is held out follows from its
key, so training and evaluation never share one."""
