from stateflow.cli import main

main()
