"""The webhook orchestrator: signed webhooks in, durable runs, weights out. Floor 3.

Accept a delivery (signing, payload, store), let it in when there is room (scheduling), carry it through launch, watch,
finish, destroy and report (workflow), and show what goes on (pages, metrics, notices). Nothing here is imported by the
rest of the package before `pennypod serve` is called: its libraries come with the extra `serve`.
"""
