# Copyright (c) the d2_memfit developers.
"""The packages and data files of d2_memfit. All else about it stands in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    # configs/ is installed as the data of d2_memfit.config.configs
    packages=[*find_packages(include=["d2_memfit*"]), "d2_memfit.config.configs"],
    package_dir={"d2_memfit.config.configs": "configs"},
    package_data={
        "d2_memfit": ["py.typed"],
        "d2_memfit.config": ["cards.csv"],
        "d2_memfit.config.configs": ["**/*.yaml"],
    },
)
