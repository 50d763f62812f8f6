"""How an engine's version stands to those that are supported."""

from __future__ import annotations

import pytest

from kvcache_otel.engines.versions import is_before, support, warning

SUPPORTED, FULL = ("0.28", "1.2"), ("0.31", "1.2")


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.27.9", "outside"),
        ("0.28", "partial"),
        ("0.28.0rc1", "partial"),
        ("0.30.2", "partial"),
        ("0.31.0", "full"),
        ("0.32.0+cpu", "full"),
        ("0.100", "full"),
        ("1.2.7.dev3+g12ab", "full"),
        ("1.3", "outside"),
        ("0.3", "outside"),
        ("dev", "unknown"),
        ("", "unknown"),
        ("1", "unknown"),
        ("v1.0", "unknown"),
        ("0.x", "unknown"),
        ("0.³", "unknown"),
    ],
)
def test_versions_are_compared_as_numbers(version: str, expected: str) -> None:
    assert support(version, SUPPORTED, FULL) == expected


def test_only_what_nobody_has_checked_is_worth_a_warning() -> None:
    assert warning("Engine", "0.28.0", SUPPORTED, FULL) == ""
    assert warning("Engine", "0.32.0", SUPPORTED, FULL) == ""
    assert warning("Engine", "0.27", SUPPORTED, FULL).startswith("Engine 0.27 is outside 0.28 to 1.2, ")
    assert warning("Engine", "dev", SUPPORTED, FULL).startswith("Engine says 'dev' for its version, ")


def test_a_version_that_cannot_be_read_is_before_none() -> None:
    assert is_before("0.31.9", "0.32")
    assert not is_before("0.32.0", "0.32")
    assert not is_before("dev", "0.32")


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.5.17", "outside"),
        ("0.5.18", "partial"),
        ("0.5.19.post1", "partial"),
        ("0.5.20", "full"),
        ("0.5.23rc2", "full"),
        ("0.5.23.post1+cu130", "full"),
        ("0.5.24", "outside"),
        ("0.6", "outside"),
        ("0.5", "outside"),
    ],
)
def test_versions_are_compared_as_far_as_the_bounds_go(version: str, expected: str) -> None:
    assert support(version, ("0.5.18", "0.5.23"), ("0.5.20", "0.5.23")) == expected


def test_a_version_is_before_another_by_its_last_number() -> None:
    assert is_before("0.5.19", "0.5.20")
    assert not is_before("0.5.20.post1", "0.5.20")
