//! A page whose contents are lost: damaged, or not to be read.

use crate::memory::PAGE;
use crate::pager::{Channel, Pager};
use crate::shared::Trouble;
use crate::sys::Errno;

/// Makes it an error for whoever touches it (SIGBUS).
///
/// # Errors
/// [`Errno::EAGAIN`]: the map is changing just now, and what is told of that may concern the page.
#[track_caller]
pub fn poison(pager: &Pager, channel: &Channel, page: u64) -> Result<(), Errno> {
    let address = page as usize * PAGE;
    match channel.uffd.poison(address, PAGE) {
        // What is there already is the truth; where no such range is any more nobody can wait.
        Ok(()) | Err(Errno::EEXIST | Errno::ENOENT | Errno::ESRCH) => channel.uffd.wake(address, PAGE),
        Err(Errno::EAGAIN) => return Err(Errno::EAGAIN),
        // Linux before 6.6 cannot poison; going on would mean a wrong page or a hang.
        Err(_) => crate::process::die(pager, Trouble::LostPage),
    }
    Ok(())
}
