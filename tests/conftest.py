"""Settings that every test shares."""

import logging
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)  # the suites of several parts run side by side

LONG = (  # files that take a minute or more begin first, so that none is waited for at the end
    "kernels/test_accelerated.py",
    "test_demo.py",
    "runtime/test_core_models.py",
    "runtime/experts/test_policies.py",
    "kernels/test_prefill_gemm.py",
    "kernels/test_audit.py",
    "kernels/test_device_moe.py",
    "runtime/parallel/test_parallel_engine.py",
    "test_cli.py",
    "test_exactness.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deep", action="store_true", help="run the tests marked deep, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--deep") and not torch.cuda.is_available():
        left_out = [item for item in items if item.get_closest_marker("deep")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("deep")]
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONG))


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """Commands set the log up; the next test, of whatever file, finds it as it is without them."""
    yield
    for logger in (logging.getLogger("moet"), logging.getLogger("uvicorn")):
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
