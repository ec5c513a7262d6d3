//! The directory of a job.

use std::fs::File;
use std::io;
use std::path::Path;

/// Locked in the directory of a job as long as the job is held, so that no other agent takes it for a leftover.
pub const LOCK: &str = ".lock";

/// Locks the directory of a job. Blocks, while another agent deletes it.
///
/// # Errors
/// When the file of the lock cannot be made.
pub fn lock(dir: &Path) -> io::Result<File> {
    let file = File::options().create(true).truncate(false).write(true).open(dir.join(LOCK))?;
    file.lock()?;
    Ok(file)
}

/// Deletes a workspace, which may be large. Blocks.
///
/// # Errors
/// When something of it stays. One that is gone already is no error.
pub fn remove_now(dir: &Path) -> io::Result<()> {
    let removed = match std::fs::remove_dir_all(dir) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            // The job closed directories to everybody, as some module caches do.
            open_directories(dir);
            std::fs::remove_dir_all(dir)
        }
        result => result,
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// The same, beside the tasks of the agent.
pub async fn remove(dir: &Path) {
    let path = dir.to_owned();
    if let Ok(Err(error)) = tokio::task::spawn_blocking(move || remove_now(&path)).await {
        tracing::warn!(dir = %dir.display(), %error, "cannot delete a workspace");
    }
}

/// Lets us into a directory and all below it; links are not followed.
fn open_directories(dir: &Path) {
    // What cannot be opened cannot be deleted either, which is said then.
    let _ = std::fs::set_permissions(dir, std::os::unix::fs::PermissionsExt::from_mode(0o700));
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        open_directories(&entry.path());
    }
}
