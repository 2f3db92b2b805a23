"""The wheel alone gets a `rooflab/__init__.py`.

pytest rewrites the assertions of a plugin's own packages.  It finds them by a top-level `__init__.py` in the wheel, and
without one it marks every file's bare name (`model`, `code`), also in the projects of others.  The tree and an editable
installation have no such file: their `rooflab` is a namespace of the five folders.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildPackage(build_py):
    """Copies the five folders, and makes their parent a regular package."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            Path(self.build_lib, "rooflab", "__init__.py").write_text('"""A lab for LLM-inference kernels."""\n')


setup(cmdclass={"build_py": BuildPackage})
