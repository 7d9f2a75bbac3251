"""`python -m loosestep.demo`: two emulated nodes with a slow link between them, torch's DDP against DASO."""
