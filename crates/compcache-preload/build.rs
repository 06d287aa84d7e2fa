//! Links the object so that nothing of it is ever resolved lazily: the loader's own structures can be evicted.

fn main() {
    println!("cargo::rustc-link-arg-cdylib=-Wl,-z,now");
    println!("cargo::rustc-link-arg-cdylib=-Wl,-z,nodelete");
    // Our fork handlers must be the first to be registered, so that in the child they run before any other's: those of
    // allocators touch memory that may be evicted.
    println!("cargo::rustc-link-arg-cdylib=-Wl,-z,initfirst");
}
