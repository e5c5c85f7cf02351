# quickstart.py
import operator

import cairn
from cairn import Job, KeyedProcess, sinks, state


class Spending(KeyedProcess):
    """Adds up the payments of an account; emits a row when the sum passes another 10,000."""

    payments = state.Value("long", default=0)
    spent = state.Reducing("long", operator.add)

    def process(self, row, ctx):
        before = self.spent.get(0)
        self.payments.set(self.payments.get() + 1)
        self.spent.add(row.amount)
        if before // 10_000 < self.spent.get() // 10_000:
            yield {
                "account": row.account,
                "payments": self.payments.get(),
                "spent": self.spent.get(),
            }


spark = cairn.session("quickstart")
payments = (
    spark.readStream.format("rate-micro-batch")
    .option("rowsPerBatch", 200)
    .load()
    .selectExpr("value % 20 AS account", "pmod(hash(value), 1000) AS amount")
)

job = Job("spending")
milestones = (
    job.source("payments", payments)
    .key_by("account")
    .process(Spending(), schema="account long, payments long, spent long", uid="spending")
)
milestones.sink_to(sinks.Console(rows_max=3), uid="console")

with job.start(checkpoint="checkpoint/spending", trigger="1 second") as run:
    run.wait(20)  # seconds; without a number it runs until it is stopped
