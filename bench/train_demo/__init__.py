"""Trains the two small demo models and writes them in the official checkpoint formats.

Run by hand on one accelerator; nothing here is part of the package."""
