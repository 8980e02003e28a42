"""The command d2-memfit, also ``python -m d2_memfit``."""

from .quiet import ignore_warnings_of_libraries


def main() -> None:
    ignore_warnings_of_libraries()
    from .cli import main  # it imports PyTorch and Detectron2

    main()


if __name__ == "__main__":
    main()
