"""The build step that pyproject.toml cannot say: gin files, which stand beside the package, go inside it in a wheel."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithGinFiles(build_py):
    """Copies gin/ to grpo_fn/gin of what is built, which is begun anew: no module of an earlier build stays in it."""

    def run(self) -> None:
        if self.editable_mode:  # the checkout itself is used
            return super().run()
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        shutil.copytree("gin", Path(self.build_lib, "grpo_fn", "gin"))
        return None


setup(cmdclass={"build_py": BuildWithGinFiles})
