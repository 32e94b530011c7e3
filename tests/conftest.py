"""Settings of all tests."""

import gc
import signal

from hypothesis import settings

# A machine may be busy with something else: how long an example takes says nothing about the code.
# The same code gets the same verdict every time; `--hypothesis-profile=explore` looks at other examples.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("repeatable")

# Thousands of tests, each of which leaves little behind: by default Python walks all that they and torch have made, a tenth
# of a second each time, for every few hundred new objects that stay.
gc.set_threshold(50_000, 20, 20)

# A shell gives what it starts with `&` an ignored SIGINT, and nohup an ignored SIGHUP; both are inherited by every process that
# a test starts, and a run leaves ignored what was ignored before.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
