package fakecri

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-client/pkg/fake"
)

// kubeletLogs is where the kubelet wants the logs of containers.
const kubeletLogs = "/var/log/pods/"

// exitSIGTERM is the exit code of a program that SIGTERM ended.
const exitSIGTERM = 143

// Container is what the kubelet asked the runtime to run.
type Container struct {
	Namespace, Pod, PodUID string
	// Name is the container's name in the pod, Attempt its restart count.
	Name    string
	Attempt uint32
	Image   string
	Command []string
	Env     map[string]string
	// CDIDevices are fully qualified CDI names.
	CDIDevices []string
	// Devices are the host paths of device nodes.
	Devices []string
	// Mounts maps container paths to host paths.
	Mounts map[string]string
	// Annotations are those of the container.
	Annotations map[string]string
	// Running is true from start to exit.
	Running bool
}

// Runtime is one node's container runtime.
type Runtime struct {
	server  *grpc.Server
	service *service
}

// Start serves the runtime on the unix socket until Stop. What the kubelet sees
// as /var/log/pods is the folder logs here.
func Start(socket, logs string) (*Runtime, error) {
	if err := os.Remove(socket); err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return nil, fmt.Errorf("container runtime: %w", err)
	}
	s := &service{
		RemoteRuntime: fake.NewFakeRemoteRuntime(),
		containers:    make(map[string]*container),
		done:          make(chan struct{}),
		logs:          logs,
	}
	s.ImageService.SetFakeImageSize(100)
	s.RuntimeService.FakeStatus = &cri.RuntimeStatus{Conditions: []*cri.RuntimeCondition{
		{Type: cri.RuntimeReady, Status: true},
		{Type: cri.NetworkReady, Status: true},
	}}
	server := grpc.NewServer()
	cri.RegisterRuntimeServiceServer(server, s)
	cri.RegisterImageServiceServer(server, s)
	go func() { _ = server.Serve(listener) }()
	go s.forgetCalls()
	return &Runtime{server: server, service: s}, nil
}

// Stop ends the runtime and with it all containers.
func (r *Runtime) Stop() {
	close(r.service.done)
	r.server.Stop()
	r.service.mu.Lock()
	defer r.service.mu.Unlock()
	for _, c := range r.service.containers {
		c.cancelEnd()
	}
}

// Containers lists what was created and not yet removed, by namespace, pod,
// name and attempt.
func (r *Runtime) Containers() []Container {
	s := r.service
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]Container, 0, len(s.containers))
	for _, c := range s.containers {
		list = append(list, c.Container)
	}
	slices.SortFunc(list, func(a, b Container) int {
		return cmp.Or(
			cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod),
			cmp.Compare(a.Name, b.Name), cmp.Compare(a.Attempt, b.Attempt),
			cmp.Compare(a.PodUID, b.PodUID),
		)
	})
	return list
}

// container is a Container with what the runtime needs to run it.
type container struct {
	Container
	behaviour
	logPath string
	end     *time.Timer
}

func (c *container) cancelEnd() {
	if c.end != nil {
		c.end.Stop()
	}
}

// service answers the CRI: Kubernetes' fake with some calls wrapped.
type service struct {
	*fake.RemoteRuntime
	mu         sync.Mutex
	containers map[string]*container // by container id
	done       chan struct{}
	logs       string
}

// forgetCalls empties the fake's log of calls now and then; it would grow for
// as long as the cluster runs.
func (s *service) forgetCalls() {
	tick := time.NewTicker(time.Minute)
	defer tick.Stop()
	for {
		select {
		case <-s.done:
			return
		case <-tick.C:
			s.RuntimeService.Lock()
			s.RuntimeService.Called = nil
			s.RuntimeService.Unlock()
			s.ImageService.Lock()
			s.ImageService.Called = nil
			s.ImageService.Unlock()
		}
	}
}

func (s *service) CreateContainer(ctx context.Context, req *cri.CreateContainerRequest) (*cri.CreateContainerResponse, error) {
	sandbox, config := req.GetSandboxConfig(), req.GetConfig()
	name := config.GetMetadata().GetName()
	b, err := parseBehaviour(sandbox.GetAnnotations(), name)
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	resp, err := s.RemoteRuntime.CreateContainer(ctx, req)
	if err != nil {
		return nil, err
	}
	c := &container{behaviour: b, Container: Container{
		Namespace: sandbox.GetMetadata().GetNamespace(), Pod: sandbox.GetMetadata().GetName(), PodUID: sandbox.GetMetadata().GetUid(),
		Name: name, Attempt: config.GetMetadata().GetAttempt(),
		Image: config.GetImage().GetUserSpecifiedImage(), Command: slices.Concat(config.GetCommand(), config.GetArgs()),
		Env: make(map[string]string), Mounts: make(map[string]string), Annotations: config.GetAnnotations(),
	}}
	if config.GetLogPath() != "" {
		seen := filepath.Join(sandbox.GetLogDirectory(), config.GetLogPath())
		if below, ok := strings.CutPrefix(seen, kubeletLogs); ok {
			c.logPath = filepath.Join(s.logs, below)
			s.RuntimeService.Lock()
			s.RuntimeService.Containers[resp.GetContainerId()].LogPath = seen
			s.RuntimeService.Unlock()
		}
	}
	for _, e := range config.GetEnvs() {
		c.Env[e.GetKey()] = string(e.GetValue())
	}
	for _, d := range config.GetCDIDevices() {
		c.CDIDevices = append(c.CDIDevices, d.GetName())
	}
	for _, d := range config.GetDevices() {
		c.Devices = append(c.Devices, d.GetHostPath())
	}
	for _, m := range config.GetMounts() {
		c.Mounts[m.GetContainerPath()] = m.GetHostPath()
	}
	s.mu.Lock()
	s.containers[resp.GetContainerId()] = c
	s.mu.Unlock()
	return resp, nil
}

func (s *service) StartContainer(ctx context.Context, req *cri.StartContainerRequest) (*cri.StartContainerResponse, error) {
	resp, err := s.RemoteRuntime.StartContainer(ctx, req)
	if err != nil {
		return nil, err
	}
	id := req.GetContainerId()
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.containers[id]
	if c == nil {
		return resp, nil
	}
	c.Running = true
	if err := c.writeLog(); err != nil {
		return nil, status.Errorf(codes.Internal, "write log of container %s: %v", c.Name, err)
	}
	if c.ends {
		c.end = time.AfterFunc(c.duration, func() { s.exit(id, c.exitCode) })
	}
	return resp, nil
}

func (s *service) StopContainer(ctx context.Context, req *cri.StopContainerRequest) (*cri.StopContainerResponse, error) {
	id := req.GetContainerId()
	s.mu.Lock()
	var delay time.Duration
	if c := s.containers[id]; c != nil && c.Running {
		delay = c.stopDelay
	}
	s.mu.Unlock()
	if timeout := time.Duration(req.GetTimeout()) * time.Second; delay > timeout {
		delay = timeout // SIGKILL ends what SIGTERM did not
	}
	select {
	case <-time.After(delay):
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	case <-s.done:
	}
	s.exit(id, exitSIGTERM)
	return &cri.StopContainerResponse{}, nil
}

func (s *service) RemoveContainer(ctx context.Context, req *cri.RemoveContainerRequest) (*cri.RemoveContainerResponse, error) {
	s.mu.Lock()
	if c := s.containers[req.GetContainerId()]; c != nil {
		c.cancelEnd()
		delete(s.containers, req.GetContainerId())
	}
	s.mu.Unlock()
	return s.RemoteRuntime.RemoveContainer(ctx, req)
}

func (s *service) StopPodSandbox(ctx context.Context, req *cri.StopPodSandboxRequest) (*cri.StopPodSandboxResponse, error) {
	// The CRI wants running containers of the sandbox ended by force.
	s.RuntimeService.Lock()
	var ids []string
	for id, c := range s.RuntimeService.Containers {
		if c.SandboxID == req.GetPodSandboxId() {
			ids = append(ids, id)
		}
	}
	s.RuntimeService.Unlock()
	for _, id := range ids {
		s.exit(id, exitSIGTERM)
	}
	return s.RemoteRuntime.StopPodSandbox(ctx, req)
}

// exit ends a running container; it does nothing to one that is not running.
func (s *service) exit(id string, code int32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.containers[id]
	if c == nil {
		return
	}
	c.cancelEnd()
	s.RuntimeService.Lock()
	defer s.RuntimeService.Unlock()
	f := s.RuntimeService.Containers[id]
	if f == nil || f.State == cri.ContainerState_CONTAINER_EXITED {
		return
	}
	if c.Running {
		f.ExitCode = code
	}
	c.Running = false
	f.State = cri.ContainerState_CONTAINER_EXITED
	f.FinishedAt = time.Now().UnixNano()
	f.Reason = "Error"
	if f.ExitCode == 0 {
		f.Reason = "Completed"
	}
}

// writeLog writes what the container was given, in the CRI's log format.
func (c *container) writeLog() error {
	if c.logPath == "" {
		return nil
	}
	lines := []string{fmt.Sprintf("simulated container %s, image %s, command %q", c.Name, c.Image, c.Command)}
	for _, d := range c.CDIDevices {
		lines = append(lines, "CDI device "+d)
	}
	for _, d := range c.Devices {
		lines = append(lines, "device node "+d)
	}
	for key, value := range c.Env {
		if strings.HasPrefix(key, "NVIDIA_") || strings.HasPrefix(key, "CUDA_") {
			lines = append(lines, key+"="+value)
		}
	}
	slices.Sort(lines[1:])
	if err := os.MkdirAll(filepath.Dir(c.logPath), 0o755); err != nil {
		return err
	}
	file, err := os.OpenFile(c.logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640)
	if err != nil {
		return err
	}
	now := time.Now().UTC().Format(time.RFC3339Nano)
	for _, line := range lines {
		if _, err = fmt.Fprintf(file, "%s stdout F %s\n", now, line); err != nil {
			break
		}
	}
	if closeErr := file.Close(); err == nil {
		err = closeErr
	}
	return err
}
