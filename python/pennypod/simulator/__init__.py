"""A look-alike of Vast.ai and RunPod on one port, with real or ghost pods. Floor 3.

clock    virtual time                       market   what can be rented, at what price
meter    money, to the micro-dollar         state    accounts, pods and their lives (pure)
faults   what goes wrong, and when          pods     containers with a real sshd, or ghosts
vast_api, runpod_api, runpod_graphql        the providers' requests and answers
control_api                                 /_sim: our own controls
server                                      HTTP around all of it
"""
