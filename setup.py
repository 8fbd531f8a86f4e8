"""What pyproject.toml cannot say: a wheel or sdist without the page does not build."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

PAGE = Path(__file__).parent / "scheduler" / "dashboard" / "page" / "built" / "index.html"
MISSING = f"the page is not built ({PAGE} is missing); run `make page` first, which needs Node.js 20 or newer"


class BuildWithPage(build_py):
    def run(self) -> None:
        if not self.editable_mode and not PAGE.is_file():
            raise SystemExit(MISSING)
        super().run()


class SdistWithPage(sdist):
    def run(self) -> None:
        if not PAGE.is_file():
            raise SystemExit(MISSING)
        super().run()


setup(cmdclass={"build_py": BuildWithPage, "sdist": SdistWithPage})
