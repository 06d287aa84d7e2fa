//! Makes the page images that are missing and says what each holds: `cargo run -p compcache-testkit --example corpus`.

use compcache_testkit::corpus::{self, Kind};

fn main() {
    println!("in {}", corpus::directory().display());
    for kind in Kind::ALL {
        match corpus::load(kind, corpus::IMAGE_PAGES) {
            Ok(pages) => {
                let share = 100.0 * corpus::same_filled_share(&pages);
                println!("{kind:10} {} pages, {share:.1} % of them same-filled", pages.len());
            }
            Err(error) => println!("{kind:10} unavailable: {error}"),
        }
    }
}
