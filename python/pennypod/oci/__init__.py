"""What pennypod needs of OCI registries: who may log in, and whether an image is really there. Floor 1."""
