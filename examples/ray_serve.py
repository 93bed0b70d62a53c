"""Replicas of a model behind Ray Serve, one engine each: `serve run examples.ray_serve:app`.

Each replica hosts the same HTTP application that `moet serve` does, so every route, stream and
error is the same. Ray starts, restarts and counts replicas; a replica whose engine has died fails
its health check and is replaced. MOET_MODEL and MOET_REPLICAS choose model and number.
"""

import os

from ray import serve
from starlette.types import ASGIApp

from moet import Engine
from moet.config import ServerConfig
from moet.server.app import create_app

engines: list[Engine] = []  # of this replica's process


def application() -> ASGIApp:
    """Called by Ray in each replica's process."""
    engines.append(Engine(os.environ.get("MOET_MODEL", "demo"), own_process=True))
    return create_app(engines[0], ServerConfig())


@serve.deployment(
    num_replicas=int(os.environ.get("MOET_REPLICAS", "2")),
    ray_actor_options={"num_cpus": 0.5, "num_gpus": float(os.environ.get("MOET_GPUS", "0"))},
    max_ongoing_requests=256,  # the engine queues and refuses by itself
    health_check_period_s=2,
)
@serve.ingress(application)
class Replica:
    """One engine with its routes."""

    def check_health(self) -> None:
        """Called by Ray; raising has the replica replaced."""
        if engines and engines[0].state == "dead":
            raise RuntimeError(f"the engine is dead: {engines[0].error}")


app = Replica.bind()
