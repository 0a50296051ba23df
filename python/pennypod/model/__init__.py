"""Values and pure rules: money, leases, offers, pods. Floor 0: no I/O, imports only `errors`."""
