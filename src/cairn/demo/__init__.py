"""The demo: kill a slot and two drivers, and count every payment.

A stream of payments arrives as files. The fraud job (examples/fraud.py) runs in a child
process. A slot is killed, later the whole driver, each while an epoch is under way, and the driver
is started again. In the second act a hot standby waits when the driver is killed, and goes on. When
all payments are through, output and state are compared with a plain Spark batch job.
"""
