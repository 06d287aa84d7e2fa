//! Links the object so that nothing of it is ever resolved lazily: the loader's own structures can be evicted.

fn main() {
    println!("cargo::rustc-link-arg-cdylib=-Wl,-z,now");
    println!("cargo::rustc-link-arg-cdylib=-Wl,-z,nodelete");
}
