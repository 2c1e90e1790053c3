"""What the tests of serving share."""

from tests.nn.conftest import compiled_fast  # noqa: F401
