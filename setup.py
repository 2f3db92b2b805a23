"""The wheel alone gets a `rooflab/__init__.py`.

Without one, pytest marks the bare names of a plugin's files (`model`, `code`) for rewriting, in the projects of others
too.  In the tree and in an editable installation `rooflab` is a namespace of the five folders.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildPackage(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            Path(self.build_lib, "rooflab", "__init__.py").write_text('"""A lab for LLM-inference kernels."""\n')


setup(cmdclass={"build_py": BuildPackage})
