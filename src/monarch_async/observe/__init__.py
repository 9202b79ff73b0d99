"""Seeing into a live job: who there is, what each is doing, who waits for whom, and why something ended.

    from monarch_async.observe.job import Job, attach

    job = Job.here()                            # the job that this program runs
    async with attach("train") as job:          # one that runs already, from another process
        for row in await job.ps():
            print(row.actor, row.state, row.endpoint)

* `job` is what users call, `records` what they get, `errors` what can go wrong.
* `inside` is the part that runs in the processes of a job. It is loaded there when somebody first looks, so that nobody pays for it else.
* `doctor` looks at this machine, `bundle` packs everything for a report.
"""
