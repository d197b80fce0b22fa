"""Where KV lives and how it comes back, one store a file; `kvjax.engine.placing` names them all."""
