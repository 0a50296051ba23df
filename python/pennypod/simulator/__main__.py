from pennypod.simulator.command import main

main()
