"""`moet bench`: how fast a server answers, how fast the engine steps, where a step's time goes."""
