"""Puts the prebuilt kernels of cubins/ into the wheel, as moet/cubins; see pyproject.toml."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithCubins(build_py):
    """An installed package has its kernels inside; a checkout, editable or not, beside it."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "moet" / "cubins"
            shutil.copytree(
                "cubins", target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*")
            )


setup(cmdclass={"build_py": BuildWithCubins})
