"""Let every clock of a Python process count its own processor seconds, so that a busy machine does not eat timeouts.

Python imports a module of this name by itself: put this folder first on PYTHONPATH, and set OMP_NUM_THREADS=1.
"""

import time

time.time = time.monotonic = time.perf_counter = time.process_time
