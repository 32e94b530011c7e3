"""Settings of all tests."""

from hypothesis import settings

# A machine may be busy with something else: how long an example takes says nothing about the code.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
