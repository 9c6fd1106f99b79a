"""Fixtures that every test may use."""

import pytest
import ranks


@pytest.fixture(scope="session")
def run_ranks():
    """`run_ranks(function, num_ranks, *args)`: see [`ranks.run_ranks`]."""
    return ranks.run_ranks
