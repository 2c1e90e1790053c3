import pytest

from tests.data.streams.broker import Broker


@pytest.fixture(scope="session")
def broker():
    return Broker()
