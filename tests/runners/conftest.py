"""Every runner test runs on both host engines: the fast one, and the one that bakes as a device."""

import pytest


@pytest.fixture(params=["host", "host_strict"])
def engine(request) -> str:
    return request.param
