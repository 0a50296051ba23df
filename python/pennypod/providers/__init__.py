"""One file or folder per provider, all behind the protocol in `base`. Floor 1."""
