"""Settings of all tests."""

import gc

from hypothesis import settings

# A machine may be busy with something else: how long an example takes says nothing about the code.
# The same code gets the same verdict every time; `--hypothesis-profile=explore` looks at other examples.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("repeatable")

# Thousands of tests, each of which leaves little behind: by default Python walks all that they and torch have made, a tenth
# of a second each time, for every few hundred new objects that stay.
gc.set_threshold(50_000, 20, 20)
