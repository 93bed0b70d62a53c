"""A model over several processes: who they are, how they talk, and what ends them."""
