"""`pip install .` installs d2_memfit with its configs. Detectron2 stays the user's choice."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

setup(
    name="d2_memfit",
    version="0.1.0",
    description="Makes any Detectron2 training job fit the memory its user has",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.9",
    # configs/ is installed as the data of d2_memfit.model_zoo.configs
    packages=[*find_packages(include=["d2_memfit*"]), "d2_memfit.model_zoo.configs"],
    package_dir={"d2_memfit.model_zoo.configs": "configs"},
    package_data={
        "d2_memfit": ["py.typed"],
        "d2_memfit.model_zoo.configs": ["**/*.yaml"],
        "d2_memfit.planner": ["devices/*.yaml"],
        "d2_memfit.report": ["*.html"],
    },
    entry_points={"console_scripts": ["d2-memfit = d2_memfit.__main__:main"]},
    # Detectron2 (v0.6 or main) is not named: it comes from many places, and none may be replaced.
    # Nothing has a version: what is there stays as it is. Nor is OpenCV here, which several
    # packages bring: only `d2-memfit draw` and Detectron2's own drawing need one.
    install_requires=[
        "torch",
        "numpy",
        "Pillow",
        "fvcore",
        "iopath",
        "pycocotools",
        "matplotlib",
        "omegaconf",
        "psutil",
        "pyyaml",
        "tabulate",
        "scipy",  # the planner's knapsack
    ],
    extras_require={
        "8bit": ["bitsandbytes"],  # MEMFIT.OPTIMIZER.STATES_8BIT
        "plot": ["plotly"],  # tools/plot_memory.py --html
        "transformers": ["transformers>=5.23"],  # projects/Transformers, Python 3.11
        "tiles": ["rasterio"],  # projects/TiledImages, to read parts of TIFF and other files
    },
)
