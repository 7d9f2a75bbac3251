"""The machinery that carries strategies out. Private: it may change with every release."""
