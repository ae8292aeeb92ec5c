"""One bound a module, each with one public function."""
