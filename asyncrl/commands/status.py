from __future__ import annotations


def main(argv: list[str]) -> int:
    raise NotImplementedError
