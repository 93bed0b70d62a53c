"""Replicas of a model behind Ray Serve, one engine each: `serve run examples.ray_serve:app`.

Each replica hosts the same HTTP application that `moet serve` does, so every route, stream and
error is the same. Ray starts, restarts and counts replicas; a replica whose engine has died fails
its health check and is replaced. MOET_MODEL and MOET_REPLICAS choose model and number.
"""

import os

from fastapi import FastAPI
from ray import serve

from moet import Engine
from moet.config import ServerConfig
from moet.server.app import create_app

front = FastAPI()


@serve.deployment(
    num_replicas=int(os.environ.get("MOET_REPLICAS", "2")),
    ray_actor_options={"num_cpus": 0.5, "num_gpus": float(os.environ.get("MOET_GPUS", "0"))},
    max_ongoing_requests=256,  # the engine queues and refuses by itself
    health_check_period_s=2,
)
@serve.ingress(front)
class Replica:
    """One engine with its routes."""

    def __init__(self) -> None:
        self.engine = Engine(os.environ.get("MOET_MODEL", "demo"), own_process=True)
        front.mount("/", create_app(self.engine, ServerConfig()))

    def check_health(self) -> None:
        """Called by Ray; raising has the replica replaced."""
        if self.engine.state != "ready":
            raise RuntimeError(f"the engine is {self.engine.state}: {self.engine.error}")


app = Replica.bind()
