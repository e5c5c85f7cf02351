"""Real drivers, real servers, real kills: the job of these tests, its targets and its readers.

    python -m tests.soak [--seconds 600] [--seed N]

runs one job into every kind of sink while drivers and slots are killed, servers go away and
parallelism changes; at the end, what came out must be what went in.
"""
