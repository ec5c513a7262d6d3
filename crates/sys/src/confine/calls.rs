//! System calls that no build needs and that lead out of a job, refused with EPERM (seccomp(2)).

use std::collections::BTreeMap;
use std::io;

use nix::libc;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, sock_filter,
};

/// Stands for the keeper of a tree, which is known only when it runs. No process has this id (`PID_MAX_LIMIT` is 2^22).
pub(crate) const KEEPER: u32 = 0x6b69_6369;
/// The same, negated: the keeper's process group.
pub(crate) const NOT_KEEPER: u32 = KEEPER.wrapping_neg();

const EVERYBODY: u32 = u32::MAX;

/// Refused whatever their arguments are: they change the host, its kernel or its mounts, or look into others.
const REFUSED: &[i64] = &[
    libc::SYS_acct,
    libc::SYS_add_key,
    libc::SYS_bpf,
    libc::SYS_clock_adjtime,
    libc::SYS_clock_settime,
    libc::SYS_delete_module,
    libc::SYS_finit_module,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fsopen,
    libc::SYS_fspick,
    libc::SYS_init_module,
    libc::SYS_kexec_file_load,
    libc::SYS_kexec_load,
    libc::SYS_keyctl,
    libc::SYS_mount,
    libc::SYS_mount_setattr,
    libc::SYS_move_mount,
    libc::SYS_open_by_handle_at,
    libc::SYS_open_tree,
    libc::SYS_perf_event_open,
    libc::SYS_pivot_root,
    libc::SYS_quotactl,
    libc::SYS_reboot,
    libc::SYS_request_key,
    libc::SYS_settimeofday,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_umount2,
    libc::SYS_userfaultfd,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ioperm,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_iopl,
];

/// Calls that signal the process named by their first argument.
const SIGNALS: &[i64] = &[
    libc::SYS_kill,
    libc::SYS_pidfd_open,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_tgkill,
    libc::SYS_tkill,
];

const PTRACE_ATTACH: u64 = 16;
const PTRACE_SEIZE: u64 = 0x4206;

/// A filter of system calls.
#[derive(Clone, Debug)]
pub struct Calls {
    pub(crate) program: Vec<libc::sock_filter>,
}

/// Whether the kernel takes filters (`CONFIG_SECCOMP_FILTER`).
pub fn calls_available() -> bool {
    let action: u32 = libc::SECCOMP_RET_ERRNO;
    // SAFETY: seccomp(2) reads one number behind the pointer, which outlives the call.
    let answer = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0, &raw const action) };
    answer == 0
}

impl Calls {
    /// A filter for commands of the process `agent` (its id and process group): besides the calls above it refuses signals to
    /// that process, to the keeper of the command and to everybody at once. With `attach` commands may trace processes that
    /// they did not start; leave that to [`super::Files`] where there is one, which bounds it to processes of the same step.
    ///
    /// # Errors
    /// On an architecture for which no filter can be made.
    pub fn new(agent: u32, agent_group: u32, attach: bool) -> io::Result<Self> {
        // In a process namespace of its own the leader of the group may be outside, which reads as 0; and 0 is one's own group.
        let agent_group = Some(agent_group.wrapping_neg()).filter(|group| *group != 0);
        let untouchable: Vec<u32> = [EVERYBODY, agent, KEEPER, NOT_KEEPER].into_iter().chain(agent_group).collect();
        Self::with(&untouchable, attach)
    }

    /// A filter for commands in a process namespace of their own: it cannot name processes outside, whose ids differ there, and
    /// need not.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn for_namespace() -> io::Result<Self> {
        Self::with(&[], true)
    }

    fn with(untouchable: &[u32], attach: bool) -> io::Result<Self> {
        let arch = TargetArch::try_from(std::env::consts::ARCH).map_err(io::Error::other)?;
        let mut rules: BTreeMap<i64, Vec<SeccompRule>> = REFUSED.iter().map(|call| (*call, Vec::new())).collect();
        let first = |value: u64| {
            let condition = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value);
            condition.and_then(|condition| SeccompRule::new(vec![condition])).map_err(io::Error::other)
        };
        // No rule at all would refuse them whomever they signal.
        for call in SIGNALS.iter().filter(|_| !untouchable.is_empty()) {
            rules.insert(*call, untouchable.iter().map(|id| first(u64::from(*id))).collect::<io::Result<_>>()?);
        }
        if !attach {
            rules.insert(libc::SYS_ptrace, vec![first(PTRACE_ATTACH)?, first(PTRACE_SEIZE)?]);
        }
        let eperm = SeccompAction::Errno(libc::EPERM.unsigned_abs());
        let filter = SeccompFilter::new(rules, SeccompAction::Allow, eperm, arch).map_err(io::Error::other)?;
        let mut native: BpfProgram = filter.try_into().map_err(io::Error::other)?;
        // Made to kill what is not of this architecture; 32-bit programs are looked at before, others get ENOSYS.
        if let Some(mismatch) = native.iter_mut().find(|i| i.k == libc::SECCOMP_RET_KILL_PROCESS && is_return(i)) {
            mismatch.k = errno(libc::ENOSYS);
        }
        let mut all = foreign(untouchable, attach);
        all.append(&mut native);
        let plain = |i: sock_filter| libc::sock_filter { code: i.code, jt: i.jt, jf: i.jf, k: i.k };
        Ok(Self { program: all.into_iter().map(plain).collect() })
    }

    /// The filter as bwrap(1) reads it: instructions of 8 bytes in native order. It does not protect the keeper.
    pub fn bytes(&self) -> Vec<u8> {
        let one = |i: &libc::sock_filter| {
            let [a, b] = i.code.to_ne_bytes();
            let [c, d, e, f] = i.k.to_ne_bytes();
            [a, b, i.jt, i.jf, c, d, e, f]
        };
        self.program.iter().flat_map(one).collect()
    }
}

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

fn is_return(instruction: &sock_filter) -> bool {
    instruction.code == RETURN
}

/// Whether an instruction compares with a constant, which may be a placeholder.
pub(crate) fn is_comparison(code: u16) -> bool {
    code == EQUAL
}

fn errno(number: i32) -> u32 {
    libc::SECCOMP_RET_ERRNO | number.unsigned_abs()
}

/// The same rules for 32-bit programs (`int 0x80`), and no x32 (its calls have bit 30 set).
#[cfg(target_arch = "x86_64")]
fn foreign(untouchable: &[u32], attach: bool) -> Vec<sock_filter> {
    const I386: u32 = 0x4000_0003;
    const X32: u32 = 0x4000_0000;
    // Numbers of the 32-bit table, in the order of the lists above; it also has the old names of some calls.
    const REFUSED_32: [u32; 38] = [
        51, 286, 357, 343, 405, 264, 404, 129, 350, 431, 432, 430, 433, 128, 283, 288, 21, 442, 429, 342, 428, 336,
        217, 131, 88, 287, 79, 115, 87, 52, 22, 374, 101, 110, 127, 130, 167, 25,
    ];
    const PTRACE_32: u32 = 26;
    const SIGNALS_32: [u32; 6] = [37, 434, 178, 335, 270, 238];
    let jump = |k, jt, jf| sock_filter { code: EQUAL, jt, jf, k };
    let load = |k| sock_filter { code: LOAD, jt: 0, jf: 0, k };
    let back = |k| sock_filter { code: RETURN, jt: 0, jf: 0, k };
    // Short lists: all jumps fit into 8 bits.
    let distance = |from: usize, to: usize| u8::try_from(to - from - 1).unwrap_or(u8::MAX);
    let refused: Vec<u32> = REFUSED_32.into_iter().chain((!attach).then_some(PTRACE_32)).collect();
    let (calls, signals, ids) = (refused.len(), SIGNALS_32.len(), untouchable.len());
    let lists = 3;
    let arguments = lists + calls + signals + 1;
    let refuse = arguments + 1 + ids + 1;
    let native = refuse + 1;
    let mut program = vec![load(4), jump(I386, 0, distance(1, native)), load(0)];
    program.extend(refused.iter().enumerate().map(|(at, call)| jump(*call, distance(lists + at, refuse), 0)));
    let signal = |(at, call): (usize, &u32)| jump(*call, distance(lists + calls + at, arguments), 0);
    program.extend(SIGNALS_32.iter().enumerate().map(signal));
    program.push(back(libc::SECCOMP_RET_ALLOW));
    program.push(load(16));
    program.extend(untouchable.iter().enumerate().map(|(at, id)| jump(*id, distance(arguments + 1 + at, refuse), 0)));
    program.push(back(libc::SECCOMP_RET_ALLOW));
    program.push(back(errno(libc::EPERM)));
    let at_least = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
    program.extend([load(0), sock_filter { code: at_least, jt: 0, jf: 1, k: X32 }, back(errno(libc::ENOSYS))]);
    program
}

#[cfg(not(target_arch = "x86_64"))]
fn foreign(_untouchable: &[u32], _attach: bool) -> Vec<sock_filter> {
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a classic BPF program (of the instructions that are used here) returns.
    fn judge(program: &[libc::sock_filter], arch: u32, call: u32, argument: u32) -> u32 {
        let (mut at, mut value) = (0, 0);
        loop {
            let i = &program[at];
            at += 1;
            let class = u32::from(i.code);
            match class & 7 {
                libc::BPF_LD => {
                    value = match i.k {
                        0 => call,
                        4 => arch,
                        16 => argument,
                        _ => 0,
                    };
                }
                libc::BPF_JMP => {
                    let yes = match class & 0xf0 {
                        libc::BPF_JEQ => value == i.k,
                        libc::BPF_JGE => value >= i.k,
                        libc::BPF_JA => {
                            at += i.k as usize;
                            continue;
                        }
                        other => panic!("an instruction that is not known here: {other:x}"),
                    };
                    at += usize::from(if yes { i.jt } else { i.jf });
                }
                libc::BPF_RET => return i.k,
                other => panic!("an instruction that is not known here: {other:x}"),
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn what_leads_out_of_a_job_is_refused_in_both_tables_and_the_rest_is_allowed() {
        const X64: u32 = 0xc000_003e;
        const X86: u32 = 0x4000_0003;
        const EPERM: u32 = libc::SECCOMP_RET_ERRNO | 1;
        const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
        let calls = Calls::new(700, 690, false).expect("a filter");
        let cases = [
            (X64, 165, 0, EPERM),  // mount
            (X64, 321, 0, EPERM),  // bpf
            (X64, 0, 0, ALLOW),    // read
            (X64, 62, 700, EPERM), // kill the agent
            (X64, 62, 690_u32.wrapping_neg(), EPERM),
            (X64, 62, u32::MAX, EPERM), // kill everybody
            (X64, 62, KEEPER, EPERM),
            (X64, 62, 701, ALLOW),
            (X64, 101, 16, EPERM), // ptrace attach
            (X64, 101, 0, ALLOW),  // ptrace traceme
            (X86, 21, 0, EPERM),   // mount
            (X86, 37, 700, EPERM), // kill the agent
            (X86, 37, 701, ALLOW),
            (X86, 26, 0, EPERM),
            (X86, 3, 700, ALLOW), // read
            (X64, 0x4000_0000 | 165, 0, libc::SECCOMP_RET_ERRNO | 38),
            (0x4000_0028, 1, 0, libc::SECCOMP_RET_ERRNO | 38),
        ];
        for (arch, call, argument, verdict) in cases {
            assert_eq!(judge(&calls.program, arch, call, argument), verdict, "{arch:x} {call} {argument}");
        }
        let tracer = Calls::new(700, 690, true).expect("a filter");
        assert_eq!(judge(&tracer.program, X64, 101, 16), ALLOW);
        // kill 0 signals one's own group, also where the agent's cannot be seen.
        let hidden = Calls::new(700, 0, false).expect("a filter");
        let inner = Calls::for_namespace().expect("a filter");
        for (arch, kill, mount) in [(X64, 62, 165), (X86, 37, 21)] {
            assert_eq!(judge(&hidden.program, arch, kill, 0), ALLOW);
            assert_eq!(judge(&hidden.program, arch, kill, 700), EPERM);
            for id in [0, 7, 700, u32::MAX] {
                assert_eq!(judge(&inner.program, arch, kill, id), ALLOW, "{arch:x} {id}");
            }
            assert_eq!(judge(&inner.program, arch, mount, 0), EPERM);
        }
    }
}
