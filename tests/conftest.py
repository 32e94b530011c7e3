"""Settings of all tests."""

from hypothesis import settings

# A machine may be busy with something else: how long an example takes says nothing about the code.
# The same code gets the same verdict every time; `--hypothesis-profile=explore` looks at other examples.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("repeatable")
