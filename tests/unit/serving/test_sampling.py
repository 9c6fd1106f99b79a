"""The table of sampling options."""

import compatibility


def test_documentation_has_the_table_that_is_checked():
    assert compatibility.read("sampling") == compatibility.sampling(), "run python tests/compatibility.py sampling"
