//! Why a tree could not be mounted or unmounted.

use std::io;
use std::path::PathBuf;

use compcache_store::StoreError;

/// Grouped by what the caller can do about it. Nothing is left mounted after any of them but [`FsError::InUse`],
/// [`FsError::Covered`], [`FsError::Elsewhere`] and [`FsError::Unmount`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FsError {
    /// The source cannot be used.
    #[error("cannot use {} as the source", path.display())]
    Source {
        /// What was named.
        path: PathBuf,
        /// Why.
        #[source]
        error: io::Error,
    },
    /// The target cannot be mounted on.
    #[error("cannot mount on {}", path.display())]
    Target {
        /// What was named.
        path: PathBuf,
        /// Why.
        #[source]
        error: io::Error,
    },
    /// A server that was killed left a mount there.
    #[error("{} is a mount whose server was killed; end it first (compcache umount {})", path.display(), path.display())]
    Dead {
        /// Where.
        path: PathBuf,
    },
    /// The tree would contain itself.
    #[error("{} lies inside {}; mount it elsewhere, or over the source itself", target.display(), origin.display())]
    Inside {
        /// Where it was to be mounted.
        target: PathBuf,
        /// What was to be seen there.
        origin: PathBuf,
    },
    /// FUSE is not there, or not for this user.
    #[error(
        "cannot mount on {} (it needs /dev/fuse, of the module fuse, and for others than root the program fusermount3, of the package fuse3, which \
         permits --allow-other if /etc/fuse.conf has user_allow_other)",
        path.display()
    )]
    Mount {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        error: io::Error,
    },
    /// There is no memory for the cache.
    #[error("cannot set up the cache; is there a limit on addresses (ulimit -v)?")]
    Memory {
        /// Why.
        #[source]
        error: StoreError,
    },
    /// Changes cannot be watched for.
    #[error(
        "cannot watch files for changes (inotify); has this user too many instances of it (sysctl fs.inotify.max_user_instances)?"
    )]
    Watch {
        /// Why.
        #[source]
        error: io::Error,
    },
    /// The kernel has FUSE by io_uring enabled, and still does not do it.
    #[error(
        "cannot have requests come by io_uring, though enable_uring of the module fuse is set; with N in /sys/module/fuse/parameters/enable_uring they come another way"
    )]
    Rings {
        /// Why.
        #[source]
        error: io::Error,
    },
    /// A thread could not be started.
    #[error("cannot start a thread")]
    Thread {
        /// Why.
        #[source]
        error: io::Error,
    },
    /// Somebody has a file or his working directory there.
    #[error("{} is in use; `fuser -vm {}` shows by whom", path.display(), path.display())]
    InUse {
        /// Where.
        path: PathBuf,
    },
    /// Something else was mounted over it, and would be unmounted in its place.
    #[error("something else ({kind}) is mounted on {}, over it; unmount that first", path.display())]
    Covered {
        /// Where.
        path: PathBuf,
        /// Of which kind it is.
        kind: String,
    },
    /// Somebody has mounted the same tree in another place as well (`mount --bind`), and uses it there.
    #[error("the same tree is mounted on {}, too; unmount it there", path.display())]
    Elsewhere {
        /// In which.
        path: PathBuf,
    },
    /// It was not unmounted.
    #[error("cannot unmount {}", path.display())]
    Unmount {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        error: io::Error,
    },
}
